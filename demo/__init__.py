"""The demo pair: a small trained Qwen3 target and two drafts, a stand-in for Qwen3-32B and 1.7B."""
