"""Chat in the model's own layout: messages to token ids, and the model's tokens to reasoning, text and tool calls."""
