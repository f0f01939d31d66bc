"""The questions that only a Trainium machine can answer, as steps of one command."""
