"""`rondo report`: the results of all rounds in one HTML file that loads nothing from the network.

`round_data` reads the files that the stages wrote, `charts` draws, `page` renders the file.
"""
