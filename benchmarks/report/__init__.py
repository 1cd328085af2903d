"""Result files, and what is written from them: tables, charts, and the page of results."""
