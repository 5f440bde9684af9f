"""The runs of this user: the record and the list entry of each, and the requests to an active one."""
