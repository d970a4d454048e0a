"""SGLang's native API, as far as its clients' generations need it: POST /generate.

Bodies, answers and streams in SGLang's shapes; everything else is the handler's.
"""
