"""FlashTTS: what its optimisations give here, and whether its arguments hold."""
