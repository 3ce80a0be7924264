"""Agents written for OpenAI's or Anthropic's client: in process, or over HTTP (endpoint.py)."""
