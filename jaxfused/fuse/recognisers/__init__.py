"""What is looked for in a program: an operator, or a few that are alike, in each file."""
