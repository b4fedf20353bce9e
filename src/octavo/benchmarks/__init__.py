"""Measuring tools behind `octavo bench`: load on a server, native kernels, their figures and plots."""
