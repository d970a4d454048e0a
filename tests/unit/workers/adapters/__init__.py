"""Adapters: PEFT files, engines that serve them."""
