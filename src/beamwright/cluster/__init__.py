"""More than one device: an engine on each, searches spread over them by Ray (extra `ray`).

Ray does placement and failures; here is who takes which search. Trees are those of one process.
"""
