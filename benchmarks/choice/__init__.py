"""The choice of implementations: its size, its effect on recorded times, and its measured table."""
