"""The rules of a policy, by what they protect: speed, safety, and drafts that pay."""
