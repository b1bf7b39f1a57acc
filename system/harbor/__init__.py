"""Harbor, both ways: our sandbox as its environment, our harnesses as its agent, our trials in its format.

For Harbor they are `system.harbor.environment:BartlebyEnvironment` and `system.harbor.agent:BartlebyAgent`. Only those
two files import it, and it wants Python 3.12 (extra `harbor`); the others work wherever Bartleby does.
"""
