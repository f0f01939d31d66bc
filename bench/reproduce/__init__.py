"""Every claim of the article beside the model and the demo pair."""
