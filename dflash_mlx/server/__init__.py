"""A local server that speaks OpenAI's API: one engine, several clients."""
