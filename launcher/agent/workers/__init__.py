"""The workers of one host: how they are started, by exec or forked, and started again alone."""
