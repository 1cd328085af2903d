import re,collections,sys
L=[l.split(None,1) for l in open(sys.argv[1])]
ad=[int(a,16) for a,_ in L]
h=[i for i,(a,t) in enumerate(L) if 'HMMA' in t]
best=None
for i,(a,t) in enumerate(L):
    m=re.search(r'BRA 0x([0-9a-f]+)',t)
    if m and int(m[1],16)<ad[i]:
        s=ad.index(int(m[1],16))
        if s<=h[0] and i>=h[-1] and (best is None or i-s<best[0]): best=(i-s,s,i)
n,s,e=best
c=collections.Counter()
for a,t in L[s:e+1]:
    w=t.split(); o=w[1] if w[0].startswith('@') else w[0]; c[o.split('.')[0]]+=1
print(n, dict(c.most_common(24)))
if len(sys.argv)>2:
    for a,t in L[s:e+1]: print(a,t.strip())
