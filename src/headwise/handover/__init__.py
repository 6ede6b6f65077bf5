"""Handing repairs over to the tools that people serve with: directories, adapters, cards, hubs."""
