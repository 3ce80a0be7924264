"""Agents written for the OpenAI client: in process (client.py), or over HTTP (endpoint.py)."""
