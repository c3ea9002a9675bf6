#!/bin/sh
# Mutation testing of the pure modules ([tool.mutmut] in pyproject.toml): small changes of the code, in mutants/, each of which
# a test has to see. mutmut has an environment of its own; it sees the project's packages as well.
# Ends with 1 if less than 90% are seen; `.rondo/mutants/env/bin/mutmut show NAME` shows one that is not.
set -eu
cd "$(dirname "$0")/.."
work=$PWD/.rondo/mutants
. tests/environments.sh
if [ ! -e "$work/made" ]; then
    new_environment "$work/env"
    install "$work/env" 'mutmut==3.8.1'
    see_project "$work/env"
    touch "$work/made"
fi
"$work/env/bin/mutmut" run "$@"
"$work/env/bin/mutmut" results
"$work/env/bin/mutmut" export-cicd-stats
.venv/bin/python -c '
import json, sys
counts = json.load(open("mutants/mutmut-cicd-stats.json"))
seen, total = counts["killed"] + counts["timeout"], counts["total"]
print(f"{seen} of {total} mutants are seen by a test: {seen / total:.1%}, wanted 90%")
sys.exit(seen < 0.9 * total)
'
