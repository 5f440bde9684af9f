"""One byte stream per host: pipes on this machine, SSH, srun, or TCP from nodes started by hand."""
