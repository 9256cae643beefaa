"""The same bits on every machine.

The mode in ``mode`` sees every operation of torch and computes it from operations that IEEE 754
defines. ``registry`` has the table of rules, ``sums`` the exact sums that most of them need. Read
``mode`` first.
"""
