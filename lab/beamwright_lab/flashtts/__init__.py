"""FlashTTS: what its optimisations gain in this engine, and whether its arguments hold."""
