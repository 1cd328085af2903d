"""Result files, and what is made of them: tables, charts, and the page of results."""
