"""One-sided READs over InfiniBand or RoCE. The only place that knows pyverbs, and what says why there is none."""
