"""The work of each rank is done somewhere: here, in processes of this machine, on Dask, or over MPI."""
