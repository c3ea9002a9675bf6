from stages.prepare.duplicates import find_duplicates, shingles

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def test_shingles_by_hand() -> None:
    assert shingles("The sky, the Sky") == {"the sky ,", "sky , the", ", the sky"}
    assert shingles("Hi there") == {"hi there"}


def test_exact_duplicates_are_equal_but_for_case_and_space() -> None:
    assert find_duplicates(["The sky", "A sea", "the  SKY ", "The sky"], 0.9) == ({2: 0, 3: 0}, {})


def test_near_duplicates_at_a_known_similarity() -> None:
    """12 words make 10 grams; another last word changes one of them: 9 shared of 11, 0.818."""
    texts = [" ".join(WORDS), " ".join([*WORDS[:-1], "dozen"]), "something else entirely, with other words"]
    assert find_duplicates(texts, 0.81) == ({}, {1: 0})
    assert find_duplicates(texts, 0.82) == ({}, {})


def test_the_texts_kept_are_not_alike() -> None:
    """Against all pairs by brute force: nothing above the threshold stays, nothing below it goes."""
    texts = [" ".join([*WORDS[: 12 - i % 7], *(f"w{i}{j}" for j in range(i % 7))]) for i in range(60)]
    exact, near = find_duplicates(texts, 0.5)
    kept = [i for i in range(60) if i not in exact and i not in near]

    def jaccard(i: int, j: int) -> float:
        return len(shingles(texts[i]) & shingles(texts[j])) / len(shingles(texts[i]) | shingles(texts[j]))

    assert all(jaccard(i, j) <= 0.5 for i in kept for j in kept if i < j)
    assert near and all(jaccard(i, j) > 0.5 for i, j in near.items())
