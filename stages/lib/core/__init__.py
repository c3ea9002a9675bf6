"""Types, errors, files, params and the command line of a stage: no number of a result is computed
here.
"""
