"""Types, errors, files, params and the command line of a stage."""
