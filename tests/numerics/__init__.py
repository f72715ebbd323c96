"""Whether what runs keeps the numeric promises: the same bits everywhere, one rounding where one is promised."""
