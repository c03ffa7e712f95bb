"""What a run leaves behind, as values and as files, and what is recorded of live traffic.

Also reads the results of other load generators. Measures nothing and judges nothing.
"""
