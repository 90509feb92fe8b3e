"""Measures a pair: suites of prompts, runs in an order that balances drift, results that say what they are."""
