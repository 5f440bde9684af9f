"""Which samples each rank gets, and sums over what the ranks measured on them."""
