"""What a step costs on this link, and the bucket sizes that leave the least of its communication exposed."""
