"""A comparison of codeQ with other task queues, under the same load.

    python -m bench.beside [--quick] [--systems celery,bullmq] [--write]

`systems` lists the rows. To add one, add an entry there and a program in `drivers`. `environments` installs each system
into an environment of its own, `measure` runs one system once, and `report` writes the table and the pictures.
"""
