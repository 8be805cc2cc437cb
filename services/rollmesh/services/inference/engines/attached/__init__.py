"""Engines whose model runs in a server that the user started: SGLang and vLLM."""
