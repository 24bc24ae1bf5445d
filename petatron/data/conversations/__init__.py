"""Conversations to fine-tune on: records become messages, a chat template writes them, and the loss reads what the assistant says."""
