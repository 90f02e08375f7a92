"""Generate steps on an OpenAI-compatible server such as vLLM (`--model openai:URL`).

The server only writes the text of steps and manages its own KV. Tree, verifier and selection run
here, as with a local model.
"""
