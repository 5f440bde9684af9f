"""What becomes of a run when something fails: who is started again, who meets whom, what is taken for a hang. Pure."""
