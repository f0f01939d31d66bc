"""Programs that run the vendor's own source, from a checkout that the user names."""
