"""Functions of rows whose bits depend on the row alone, not on the rows beside it, on their number or on where it is among them.

A library chooses its kernel, and with it the order of a sum, by the shape of a call. So the log-probability that a token had when it was
drawn, in a batch of a few rows, is not the one that training computes for it among thousands: they differ in their last bits. Here both are
the same number, because generation and training call the same functions, and each of these is one of three kinds:

    fixed shape    a library is called with one shape only, whatever the number of rows: blocks of rows, the last one padded (CPUs)
    fixed tile     a Triton kernel whose tile and order of sums follow from the widths of a row alone (GPUs)
    exact steps    additions, products and divisions of IEEE arithmetic, each rounded once in every kernel; sums in a fixed tree

`registry.py` chooses them where a `KernelContext` asks for it.
"""
