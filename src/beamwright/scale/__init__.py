"""More than one device: an engine on each, problems spread over them by Ray (extra `ray`).

Ray does placement and failures; here is who takes which problem. Trees are those of one process.
"""
