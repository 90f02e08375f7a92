"""Attention kernels in Triton, over paged KV. Triton is loaded only when a kernel backend is made.

`worklist` cuts paths into parts, `programs` holds the kernels, `launch` starts them on tensors, and
`views` are the backends. Their oracle is `attention.reference`.
"""
