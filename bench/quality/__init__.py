"""Does speculation change a token? Answers both ways, compared."""
