"""Generators that run somewhere else: behind an OpenAI-compatible server.

They write steps and say what they drew; trees, verifiers, selection and accounting are those of
every other generator. Their KV is their own.
"""
