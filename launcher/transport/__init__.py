"""One byte stream a host: pipes on this machine, SSH, srun, or TCP from nodes on which somebody types the command."""
