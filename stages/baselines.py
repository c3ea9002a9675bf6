"""What a reward model has to beat: shortcuts that need no language model."""

from stages.prompts import Prompt
from stages.records import Row


def longest_wins_accuracy(pairs: list[Row]) -> float:
    """Share of pairs whose chosen text is the longer one, in characters; equal lengths count half."""
    wins = sum(1.0 if len(p["chosen"]) > len(p["rejected"]) else 0.5 if len(p["chosen"]) == len(p["rejected"]) else 0.0 for p in pairs)
    return wins / len(pairs)


def tfidf_accuracy(train: list[Row], held_out: list[Row], seed: int) -> float:
    """Bradley-Terry on TF-IDF features: logistic regression on the difference of a pair's vectors, without intercept."""
    from scipy.sparse import vstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    def text(row: Row, side: str) -> str:
        return flat(row["prompt"]) + row[side]

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    vectorizer.fit([text(row, side) for row in train for side in ("chosen", "rejected")])

    def differences(rows: list[Row]):  # type: ignore[no-untyped-def]  # scipy.sparse matrices have no stubs
        return vectorizer.transform([text(r, "chosen") for r in rows]) - vectorizer.transform([text(r, "rejected") for r in rows])

    better = differences(train)
    model = LogisticRegression(fit_intercept=False, C=10.0, max_iter=1000, random_state=seed)
    model.fit(vstack([better, -better]), [1] * len(train) + [0] * len(train))
    margins = model.decision_function(differences(held_out))
    return float((margins > 0).mean() + 0.5 * (margins == 0).mean())


def flat(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else " ".join(message["content"] for message in prompt)
