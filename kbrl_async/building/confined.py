"""Entries of the confined Python that backends start through `Workshop.python`: what of a candidate has to run in
order to be built (recording its compile calls, compiling its Triton kernels) runs here and nowhere else.
"""
