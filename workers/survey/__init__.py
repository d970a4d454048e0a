"""What a model folder comes to: what will run it, how, and how much memory it takes.

Reads small files and the headers of weights; builds models without memory, on no device.
"""
