"""A suite with each kind of case; the last one is too long for the pocket pair."""

SUITE = """
name = "small"
about = "two turns and a text"
rebuilds = "nothing"
max_tokens = 12
reasoning = "low"
[[case]]
name = "talk"
turns = ["Write a function read_line.", "Add a docstring."]
[[case]]
name = "text"
text = "def read_lines(path):"
[[case]]
name = "long"
fill_tokens = 8192
"""
