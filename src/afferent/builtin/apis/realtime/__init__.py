"""OpenAI Realtime: live sessions over a WebSocket."""
