"""Benchmarks, in folders by what they answer; README.md lists them. Helpers that they share are in common/."""
