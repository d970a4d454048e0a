"""The gated delta rule: linear attention whose state forgets and corrects itself."""
