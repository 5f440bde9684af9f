"""What the tests stand on: real SSH hosts on loopback, real processes, and proof that they are gone."""
